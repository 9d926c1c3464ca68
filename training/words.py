"""What signs say: common words (some held out for the evaluation), made-up words and numbers."""

from __future__ import annotations

import random

from training.scenes import DIGITS, LETTERS

WORDS = """
OPEN CAFE SHOP BAR TAXI HOTEL BANK EXIT STOP PIZZA BREAD MILK BOOKS SALE PARK ZOO GYM POST TEA INN DELI FISH CAKE TOYS
SHOES MUSIC BUS FOOD WINE CLOSED ENTER PUSH PULL HELLO WELCOME HOME CITY TRAIN PORT BEACH LAKE RIVER ROAD STREET NORTH
SOUTH EAST WEST LEFT RIGHT SLOW FAST DANGER WATER FIRE ICE HOT COLD FREE NEW OLD BIG SMALL MENU LUNCH DINNER BAKERY
MARKET STORE SCHOOL CINEMA MUSEUM LIBRARY POLICE DOCTOR NURSE TICKET GARAGE GARDEN FLOWER COFFEE SUGAR SALAD SOUP PASTA
RICE BURGER FRIES JUICE BEER GOLD SILVER STAR MOON SUN SKY CLOUD RAIN SNOW WIND TREE BIRD CAT DOG HORSE MOUSE LION
TIGER BEAR WOLF APPLE LEMON PEACH GRAPE MELON ONION TOMATO CARROT BUTTER CHEESE EGG HAM MEAT JAM HONEY SALT PEPPER
WAIT LOOK LISTEN STAY GO YES NO KEEP OUT OFF ON UP DOWN IN PAY CASH CARD LIFT STAIRS TOILET MEN WOMEN BOYS GIRLS KIDS
BABY LOVE PEACE DREAM NIGHT DAY LIGHT DARK RED GREEN BLUE PINK BLACK WHITE BROWN ORANGE PURPLE CYAN YELLOW SPORT GAME
PLAY CLUB DANCE ROCK JAZZ POP DISCO RADIO PHOTO VIDEO PHONE CAMERA PRINT PAPER PEN BOOK ART PAINT WOOD STONE GLASS
METAL IRON STEEL TOOLS BIKE CAR TRUCK BOAT SHIP PLANE FLIGHT GATE HALL ROOM FLOOR DOOR KEY LOCK BELL BOX BAG HAT COAT
SHIRT DRESS SOCK GLOVE RING WATCH CLOCK TIME HOUR WEEK MONTH YEAR
""".split()  # noqa: SIM905
HELD_OUT_WORDS = [w for i, w in enumerate(sorted(set(WORDS))) if i % 8 == 3]
TRAINING_WORDS = [w for i, w in enumerate(sorted(set(WORDS))) if i % 8 != 3]

AMBIGUOUS = "O0I1"  # alone, letter and digit look the same in many fonts


def sign_text(rng: random.Random, words: list[str], longest: int = 7) -> str:
    """A word from the list, random letters, a number, or letters and digits mixed."""
    kind = rng.random()
    if kind < 0.3:
        return next((w for w in rng.choices(words, k=20) if len(w) <= longest), "GO"[:longest])
    length = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7))
    length = min(length, longest)
    if length == 1:
        return rng.choice([c for c in LETTERS + DIGITS if c not in AMBIGUOUS])
    if kind < 0.7:
        return "".join(rng.choice(LETTERS) for _ in range(length))
    if kind < 0.93:
        length = min(length, 6)
        return str(rng.randint(10 ** (length - 1), 10**length - 1))
    pool = [c for c in LETTERS + DIGITS if c not in AMBIGUOUS]
    return "".join(rng.choice(pool) for _ in range(length))
