"""Words for prompts: English and made-up ones, so that knowing a list of words is not enough."""

from __future__ import annotations

import random
from string import ascii_lowercase

from alignedserve.demo.vocabulary import PIECES

_ENGLISH = """
able acid acorn actor adult agent alarm album alley almond amber anchor angle ankle answer ant apple apron
arch arrow artist ash aspen atlas atom autumn avenue badge baker ball bamboo banana band bank barley barn
basin basket bat beach bead beam bean bear beaver bed bee bell belt bench berry bicycle bird biscuit bison
blanket blossom blue boat bolt bone book boot bottle bow bowl box branch brass bread brick bridge brook
broom brother brown brush bucket bud buffalo bus bush butter button cabin cable cactus cake camel camera
camp canal candle canoe canvas cap captain car card carpet carrot cart castle cat cave cedar ceiling cello
chain chair chalk cheese cherry chest chicken chimney cinnamon circle city clay cliff clock cloud clover
coal coast coat cobalt coffee coin color comet compass copper coral cork corn cotton cousin cow crab cradle
crane crayon cream creek cricket crow crown cube cup curtain cushion dagger daisy dance dawn deer desert
desk diamond dinner dish dog dolphin donkey door dove dragon drawer dream dress drum duck dune dust eagle
ear earth east echo edge eel egg elbow elephant elm ember emerald engine envelope evening eye fabric falcon
family farm father feather fence fern ferry field fig finger fire fish flag flame flask flower flute foam
fog folder forest fork fountain fox frame frost fruit garage garden garlic gate gesture giant ginger giraffe
glacier glass globe glove goat gold goose grain granite grape grass gravel green grove guitar gull hammer
harbor harp harvest hat hawk hazel heart hedge helmet hen heron hill hinge honey hook horizon horn horse
hotel house hut ice igloo ink insect iris iron island ivory ivy jacket jaguar jar jasmine jeans jelly jewel
jungle juniper kettle key king kitchen kite kitten knee knife knot ladder lagoon lake lamp lantern laptop
lark lava lavender leaf leather lemon lens leopard library light lily lime linen lion lizard lobster lock
log lotus lunch machine magnet maize mango maple marble market marsh mask meadow melon metal mill mint
mirror mist mitten mole monkey moon morning moss moth mountain mouse mud muffin mule museum mushroom music
nail napkin needle nest net nickel night north notebook nut oak oasis oat ocean olive onion opal orange
orchard orchid otter oval oven owl oyster paddle page paint palace palm pan panda paper parade park parrot
parsley path peach peacock pear pearl pebble pen pencil pepper petal piano picnic pigeon pillow pilot pine
planet plate plum pocket pond pony poppy porch potato prairie prism pumpkin puppy purple quail quartz queen
quilt rabbit radio radish raft rain raven reed ribbon rice ridge ring river road robin rocket roof rope rose
ruby rug sail salad salmon salt sand sandal satin saturn scarf school scissors sea seal seed shadow shark
sheep shell ship shirt shoe shore silk silver sister sky sleeve slope snail snow soap sock soil sparrow
spice spider spinach spoon spring spruce square squirrel stable star statue steam steel stone storm stove
straw stream street sugar summer sun swan sweater table tablet tail tea teapot temple tent thistle thread
thunder ticket tiger tile timber toast tomato torch tower town toy train tray tree triangle truck trumpet
tulip tunnel turkey turnip turtle umbrella uncle valley vanilla vase velvet village vine violet violin
volcano wagon wall walnut walrus water wave weasel west whale wheat wheel whistle willow wind window wing
winter wolf wood wool wren yacht yard yarn yellow zebra zinc
"""
ENGLISH = tuple(_ENGLISH.split())

MAX_WORD_LEN = 12

_VOWELS = "aeiou"
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"


def random_letters(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(ascii_lowercase) for _ in range(length))


def pronounceable(rng: random.Random, length: int) -> str:
    """Returns a made-up word of alternating consonants and vowels, with some doubled letters."""
    letters: list[str] = []
    vowel_next = rng.random() < 0.5
    while len(letters) < length:
        if letters and rng.random() < 0.1:
            letters.append(letters[-1])
        else:
            letters.append(rng.choice(_VOWELS if vowel_next else _CONSONANTS))
            vowel_next = not vowel_next
    return "".join(letters)


def any_word(rng: random.Random, min_len: int = 2, max_len: int = MAX_WORD_LEN) -> str:
    """Returns an English or a made-up word, each about half of the time. It is never a single token."""
    while True:
        word = _any_word(rng, min_len, max_len)
        if min_len <= len(word) <= max_len and f" {word}" not in PIECES:
            return word


def _any_word(rng: random.Random, min_len: int, max_len: int) -> str:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(ENGLISH)
    length = rng.randint(min_len, max_len)
    return random_letters(rng, length) if kind < 0.75 else pronounceable(rng, length)
