"""Which fonts signs are drawn with: some for training, others held out for the evaluation.

The files come from Debian packages (README.md lists them) and from Pillow itself, whose built-in font is held out.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

BUILT_IN = ""  # stands for Pillow's own font, ImageFont.load_default(size)

TRAINING_FONTS = """
DejaVuSans.ttf DejaVuSans-Bold.ttf DejaVuSansMono.ttf DejaVuSansMono-Bold.ttf DejaVuSerif.ttf DejaVuSerif-Bold.ttf
LiberationSans-Regular.ttf LiberationSans-Bold.ttf LiberationSans-Italic.ttf LiberationSansNarrow-Bold.ttf
LiberationSansNarrow-Regular.ttf LiberationMono-Regular.ttf LiberationMono-Bold.ttf LiberationSerif-Regular.ttf
LiberationSerif-Bold.ttf Roboto-Regular.ttf Roboto-Bold.ttf Roboto-Black.ttf Roboto-Light.ttf Roboto-MediumItalic.ttf
RobotoCondensed-Bold.ttf RobotoCondensed-Regular.ttf OpenSans-Regular.ttf OpenSans-Bold.ttf OpenSans-ExtraBold.ttf
OpenSans-CondBold.ttf OpenSans-Semibold.ttf FreeSans.ttf FreeSansBold.ttf FreeSerif.ttf FreeSerifBold.ttf
FreeMonoBold.ttf Cantarell-Regular.otf Cantarell-Bold.otf Cantarell-ExtraBold.otf Comfortaa-Bold.ttf
Comfortaa-Regular.ttf Carlito-Regular.ttf Carlito-Bold.ttf Caladea-Regular.ttf Caladea-Bold.ttf Play-Bold.ttf
Play-Regular.ttf Quicksand-Bold.ttf Quicksand-Medium.ttf Inter-Regular.otf Inter-Bold.otf FiraCode-Medium.ttf
FiraCode-Bold.ttf Hack-Regular.ttf Hack-Bold.ttf JetBrainsMono-Bold.ttf JetBrainsMono-Regular.ttf
EBGaramond12-Bold.otf EBGaramond12-Regular.otf LeagueSpartan-Bold.otf LeagueSpartan-Medium.otf BebasNeue-Bold.otf
BebasNeue-Regular.otf C059-Bold.otf C059-Roman.otf P052-Bold.otf P052-Roman.otf NimbusSansNarrow-Bold.otf
NimbusMonoPS-Bold.otf URWBookman-Demi.otf URWBookman-Light.otf URWGothic-Demi.otf URWGothic-Book.otf
AccanthisADFStd-Bold.otf GilliusADF-Bold.otf GilliusADF-Regular.otf GilliusADF-BoldCond.otf
Tuffy.ttf Tuffy_Bold.ttf Go-Bold.ttf Go-Regular.ttf Go-Mono-Bold.ttf LinBiolinum_RB.otf LinBiolinum_R.otf
LinLibertine_RB.otf Dosis-Bold.otf Dosis-SemiBold.otf YanoneKaffeesatz-Bold.otf YanoneKaffeesatz-Medium.otf
STIXGeneral-Bold.otf STIXGeneral-Regular.otf Karla-Bold.otf Karla-Regular.otf Cabin-Bold.otf Cabin-Regular.otf
Cabin-SemiBold.otf
""".split()  # noqa: SIM905   noqa: SIM905

HELD_OUT_FONTS = "Lato-Regular.ttf Lato-Bold.ttf GenBasB.ttf".split()  # noqa: SIM905   and Pillow's built-in font


def find_fonts(folder: Path, names: list[str]) -> list[str]:
    """Paths of those of the named font files that lie anywhere under the folder."""
    found = {path.name: str(path) for path in sorted(folder.rglob("*")) if path.suffix in (".ttf", ".otf")}
    return [found[name] for name in names if name in found]


@lru_cache(maxsize=4000)
def load_font(path: str, size: int) -> ImageFont.FreeTypeFont:
    """A font at a size in pixels per em."""
    if path == BUILT_IN:
        font = ImageFont.load_default(size)
        assert isinstance(font, ImageFont.FreeTypeFont)
        return font
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
