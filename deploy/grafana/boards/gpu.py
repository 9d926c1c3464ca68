"""The devices."""

from panels import board, only, panel

BY_GPU = "{{instance}} GPU {{gpu}}"

BOARD = board(
    "gpu",
    "GPU",
    "Are the devices busy, and are they well? Empty on machines without.",
    [
        panel(
            "Utilization",
            "Which share of the time does the GPU run anything?",
            [(only("askimage_gpu_utilization_ratio"), BY_GPU)],
            "percentunit",
        ),
        panel(
            "Memory in use",
            "Is there memory left?",
            [(f"{only('askimage_gpu_memory_used_bytes')} / {only('askimage_gpu_memory_total_bytes')}", BY_GPU)],
            "percentunit",
            alerts=["AskimageGpuMemory"],
            limit=0.9,
        ),
    ],
    [
        panel(
            "Temperature",
            "Is the GPU about to slow itself down?",
            [(only("askimage_gpu_temperature_celsius"), BY_GPU)],
            "celsius",
            alerts=["AskimageGpuTemperature"],
            limit=85,
        ),
        panel("Power", "How much does it draw?", [(only("askimage_gpu_power_watts"), BY_GPU)], "watt"),
    ],
    [
        panel(
            "Uncorrected memory errors",
            "Did the GPU lose what was in its memory within the hour?",
            [(f"increase({only('askimage_gpu_ecc_errors_total')}[1h])", BY_GPU)],
            alerts=["AskimageGpuEcc"],
            limit=1,
        ),
        panel(
            "Xid errors",
            "Did the driver report an error within a quarter of an hour?",
            [(f"increase({only('askimage_gpu_xid_errors_total')}[15m])", BY_GPU)],
            alerts=["AskimageGpuXid"],
            limit=1,
        ),
    ],
)
