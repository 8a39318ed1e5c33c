"""Words of which only one can be meant: opposites, members of one class, words with a prefix.

A table of words can never be whole; what is here are classes, and the selector learns the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

_PAIRS = (
    "enable disable;increase decrease;before after;first last;minimum maximum;min max;open close;"
    "start stop;start end;begin end;start finish;buy sell;allow deny;allow block;allow forbid;"
    "allow forbidden;allow prohibit;permit forbid;permit prohibit;legal prohibited;add remove;"
    "insert delete;create delete;create drop;encrypt decrypt;encode decode;compress decompress;"
    "import export;push pull;read write;upload download;lock unlock;connect disconnect;"
    "install uninstall;up down;upgrade downgrade;ascending descending;asc desc;true false;on off;"
    "yes no;input output;in out;left right;inner outer;new old;success failure;succeed fail;"
    "pass fail;win lose;gain lose;find lose;send receive;give take;lend borrow;teach learn;"
    "hire fire;accept reject;accept decline;approve reject;approve decline;public private;"
    "local remote;local global;domestic international;internal external;client server;"
    "producer consumer;source destination;sender receiver;sender recipient;above below;over under;"
    "activate deactivate;freeze unfreeze;subscribe unsubscribe;attach detach;mount unmount;"
    "load unload;pack unpack;serialize deserialize;deposit withdraw;deposit withdrawal;"
    "debit credit;refund charge;gain loss;profit loss;advantage disadvantage;advantage drawback;"
    "pro con;"
    "benefit risk;benefit drawback;strength weakness;cause effect;same different;with without;"
    "include exclude;includ exclud;positive negative;synchronous asynchronous;sync async;"
    "raise lower;rise fall;grow shrink;expand collapse;show hide;lossy lossless;mutable immutable;"
    "static dynamic;primary secondary;master replica;parent child;ancestor descendant;row column;"
    "horizontal vertical;male female;love hate;war peace;birth death;alive dead;virtual physical;"
    "temporary permanent;manual automatic;always never;always rarely;often rarely;often seldom;"
    "stop restart;next previous;next last;past future;arrival departure;arrive depart;arrive leave;"
    "entrance exit;enter exit;enter leave;push pop;buyer seller;lender borrower;landlord tenant;"
    "teacher student;doctor patient;winner loser;plaintiff defendant;supply demand;front back;"
    "top bottom;more less;more few;more fewer;most fewest;most least;most few;best worst;"
    "better worse;many few;all some;all few;sunrise sunset;singular plural;upper lower;"
    "major minor;odd even;"
    "without except;latest earliest;newest oldest;payer payee"
)
# Both of a pair, their comparatives and superlatives.
_DEGREES = (
    "big small;large small;long short;high low;tall short;fast slow;quick slow;hot cold;warm cool;"
    "early late;good bad;safe unsafe;rich poor;strong weak;heavy light;hard easy;difficult easy;"
    "cheap expensive;full empty;deep shallow;thick thin;wide narrow;near far;close far;dry wet;"
    "dark bright;dark light;old young;clean dirty;loud quiet;hard soft;rough smooth;simple complex"
)
# Of one class only one is meant; "/" joins words for the same. Two questions that name different
# members ask for different things.
_CLASSES = (
    "nobody nothing nowhere", "somebody/someone something somewhere",
    "everybody/everyone everything everywhere",
    "north/northern south/southern east/eastern west/western",
    "spring summer autumn winter", "morning afternoon evening night/nighttime noon midnight day",
    "breakfast lunch dinner/supper",
    "red green blue yellow black white orange purple pink brown grey/gray",
    "mother/mom/mum/mama father/dad/daddy son daughter brother sister uncle aunt nephew niece "
    "husband wife grandfather/grandpa grandmother/grandma boyfriend girlfriend",
    "he/him/his/himself she/her/hers/herself", "man/men woman/women", "boy girl", "king queen",
    "prince princess", "daily weekly monthly yearly/annually/annual quarterly hourly",
    "usd/dollar/dollars/bucks eur/euro/euros gbp/sterling yen/jpy yuan/rmb/cny rupee/rupees/inr "
    "franc/francs/chf rouble/ruble/rub peso/pesos won/krw aud cad zloty/pln krona/sek",
    "mile/miles kilometer/kilometre/kilometers/kilometres/km meter/metre/meters/metres foot/feet "
    "inch/inches yard/yards centimeter/centimetre/cm millimeter/millimetre/mm",
    "kilogram/kilograms/kg gram/grams lb/lbs ounce/ounces tonne/tonnes/ton/tons stone",
    "celsius fahrenheit kelvin", "liter/litre/liters/litres gallon/gallons pint/pints",
    "kb kilobyte mb megabyte gb gigabyte tb terabyte",
    "windows linux macos/mac android ios/iphone/ipad", "chrome firefox safari edge",
    "python java javascript typescript ruby php perl kotlin scala golang haskell cobol fortran",
    "postgres/postgresql mysql sqlite oracle mongodb mariadb",
    "json xml yaml csv toml parquet pdf html markdown", "http https ftp ssh smtp",
    "get post put patch", "single double triple", "gold silver bronze platinum copper",
    "dog/dogs cat/cats horse/horses rabbit/rabbits hamster bird/birds",
    "christmas easter thanksgiving halloween ramadan passover diwali hanukkah",
    "mercury venus earth mars jupiter saturn uranus neptune pluto",
    "english/england french/france german/germany spanish/spain italian/italy portuguese/portugal "
    "dutch/netherlands polish/poland swedish/sweden norwegian/norway danish/denmark "
    "finnish/finland greek/greece turkish/turkey russian/russia ukrainian/ukraine chinese/china "
    "japanese/japan "
    "korean/korea indian/india hindi arabic brazilian/brazil mexican/mexico canadian/canada "
    "australian/australia irish/ireland scottish/scotland austrian/austria swiss/switzerland "
    "belgian/belgium czech hungarian/hungary romanian/romania vietnamese/vietnam thai/thailand "
    "egyptian/egypt american/usa british/uk",
    "english/england kenyan/kenya ghanaian/ghana nigerian/nigeria ethiopian/ethiopia "
    "tanzanian/tanzania ugandan/uganda rwandan/rwanda moroccan/morocco algerian/algeria "
    "tunisian/tunisia libyan/libya sudanese/sudan somali/somalia senegalese/senegal "
    "zambian/zambia zimbabwean/zimbabwe namibian/namibia angolan/angola mozambican/mozambique "
    "cameroonian/cameroon congolese/congo argentinian/argentine/argentina chilean/chile "
    "peruvian/peru colombian/colombia venezuelan/venezuela bolivian/bolivia uruguayan/uruguay "
    "paraguayan/paraguay ecuadorian/ecuador cuban/cuba jamaican/jamaica haitian/haiti "
    "guatemalan/guatemala honduran/honduras nicaraguan/nicaragua panamanian/panama "
    "iraqi/iraq iranian/iran syrian/syria lebanese/lebanon israeli/israel saudi kuwaiti/kuwait "
    "qatari/qatar yemeni/yemen omani/oman afghan/afghanistan pakistani/pakistan "
    "bangladeshi/bangladesh nepali/nepalese/nepal indonesian/indonesia malaysian/malaysia "
    "filipino/philippines cambodian/cambodia laotian/laos burmese/myanmar mongolian/mongolia "
    "kazakh/kazakhstan uzbek/uzbekistan armenian/armenia azerbaijani/azerbaijan "
    "icelandic/iceland estonian/estonia latvian/latvia lithuanian/lithuania belarusian/belarus "
    "moldovan/moldova bulgarian/bulgaria serbian/serbia croatian/croatia bosnian/bosnia "
    "slovenian/slovenia slovak/slovakia albanian/albania macedonian/macedonia cypriot/cyprus "
    "maltese/malta luxembourgish/luxembourg french/france german/germany spanish/spain "
    "italian/italy indian/india chinese/china japanese/japan american/usa british/uk "
    "norwegian/norway swedish/sweden danish/denmark finnish/finland",
    "london paris berlin madrid rome vienna lisbon dublin amsterdam brussels prague warsaw "
    "budapest athens stockholm oslo copenhagen helsinki moscow istanbul tokyo beijing shanghai "
    "delhi mumbai sydney melbourne toronto montreal chicago boston seattle houston miami "
    "barcelona munich hamburg milan naples geneva zurich dubai cairo singapore",
)  # fmt: skip
# Small words that stand in many questions: they tell two apart only where the rest is the same.
_LOOSE_CLASSES = (
    "before after until/till since within during every ago",
    "this next last/previous/past",
)
_LOOSE_WORDS = frozenset((
    "in", "out", "on", "off", "up", "down", "with", "without", "over", "under", "before", "after",
    "until", "till", "since", "within", "during", "every", "ago", "this", "next", "last",
    "previous", "past", "all", "some", "more", "most", "less", "no", "yes", "first", "back", "day",
    "top", "end", "get", "post", "put", "foot", "back", "front", "same", "even", "close",
))  # fmt: skip
_DENYING_PREFIXES = ("un", "in", "im", "ir", "il", "dis", "non", "de", "mis", "anti")
_PREFIX_PAIRS = (
    "over under;hyper hypo;micro macro;pre post;in out;up down;super sub;inter intra;mono poly;"
    "mono multi;single multi;ex im;en de;homo hetero;pro anti;mini maxi;fore back;in ex;uni bi;"
    "bi tri;endo exo;north south;east west"
)
_PREFIXES: dict[str, list[str]] = {}
for _one, _other in (pair.split() for pair in _PREFIX_PAIRS.split(";")):
    _PREFIXES.setdefault(_one, []).append(_other)
    _PREFIXES.setdefault(_other, []).append(_one)


def _degrees(word: str) -> list[str]:
    """Return an adjective with its comparative and superlative ("big", "bigger", "biggest")."""
    if len(word) > 7:
        return [word]
    if word.endswith("e"):
        root = word[:-1]
    elif word.endswith("y"):
        root = word[:-1] + "i"
    elif word[-1] in "bdgmnpt" and word[-2] in "aeiou" and word[-3] not in "aeiou":
        root = word + word[-1]
    else:
        root = word
    return [word, root + "er", root + "est"]


def loose_of(stem_of: Callable[[str], str]) -> frozenset[str]:
    """Return the stems of words that are opposites only where the rest is the same."""
    return frozenset(map(stem_of, _LOOSE_WORDS))


def opposites_of(stem_of: Callable[[str], str]) -> dict[str, frozenset[str]]:
    """Build the table: the stem of each word, with the stems of what cannot be meant beside it."""
    table: dict[str, set[str]] = {}

    def opposed(one: str, other: str) -> None:
        one, other = stem_of(one), stem_of(other)
        if one != other:
            table.setdefault(one, set()).add(other)
            table.setdefault(other, set()).add(one)

    for pair in _PAIRS.split(";"):
        words = pair.split()
        opposed(words[0], words[-1])
    for pair in _DEGREES.split(";"):
        one, other = pair.split()
        for left, right in itertools.product(_degrees(one), _degrees(other)):
            opposed(left, right)
    for members in (*_CLASSES, *_LOOSE_CLASSES):
        groups = [group.split("/") for group in members.split()]
        for left_group, right_group in itertools.combinations(groups, 2):
            for left, right in itertools.product(left_group, right_group):
                opposed(left, right)
    return {word: frozenset(others) for word, others in table.items()}


def denial_of(word: str, others: set[str]) -> str:
    """Return the one of ``others`` that is this word with a negating affix more or less, or ""."""
    for prefix in _DENYING_PREFIXES:
        rest = word[len(prefix) :] if word.startswith(prefix) else ""
        if len(rest) > 3 and rest in others:
            return rest
        if len(word) > 3 and prefix + word in others:
            return prefix + word
    bare = word.removesuffix("less")
    other = word + "less" if bare == word else bare
    return other if len(bare) > 3 and other in others else ""


def turned_of(word: str, others: set[str]) -> str:
    """Return the one of ``others`` that has the opposite prefix, or is the other side of one deed.

    "Overweight" and "underweight", "prewar" and "postwar"; "employer" and "employee".
    """
    turned = [
        opposite + word[len(prefix) :]
        for prefix, opposites in _PREFIXES.items()
        if word.startswith(prefix) and len(word) - len(prefix) >= 3
        for opposite in opposites
    ]
    if word.endswith("er"):
        turned += [other for other in (word[:-1], word[:-1] + "e") if len(other) > 4]
    if word.endswith("e") and len(word) > 4:
        turned.append(word + "r")
    if word.endswith("ee") and len(word) > 4:
        turned.append(word[:-1] + "r")
    return min((other for other in turned if other in others), default="")
