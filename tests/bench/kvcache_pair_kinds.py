"""More kinds of labelled pairs for `bench_kvcache_reuse_shapes.py`, made by seed.

All but the headings, which are those of documentation, are of words that stand here.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

Labelled = tuple[str, str, bool]

HEADING_FORMS = (
    "{x}", "what is {x}?", "how does {x} work", "explain {x}", "where do I read about {x}?",
    "tell me about {x} please", "documentation of {x}", "I need to know more on {x}",
    "{x}: what should I know?", "give an overview of {x}",
)  # fmt: skip
AMOUNTS = [
    ("5 minutes", "300 seconds", "10 minutes"),
    ("2 hours", "120 minutes", "3 hours"),
    ("1 GB", "1024 MB", "2 GB"),
    ("5 km", "5000 m", "7 km"),
    ("half an hour", "30 minutes", "45 minutes"),
    ("90 minutes", "1.5 hours", "2.5 hours"),
    ("250 ms", "0.25 s", "0.5 s"),
    ("20 percent", "20%", "25%"),
    ("a dozen", "12", "15"),
    ("1,500", "1500", "2500"),
    ("two weeks", "14 days", "21 days"),
    ("3 kg", "3000 g", "4 kg"),
]
VERBS = ("set|change|put", "raise|increase", "limit|cap")
SETTINGS = (
    "the request timeout",
    "the cache size",
    "the retry interval",
    "the report period",
    "the session length",
    "the quota",
    "the delivery range",
    "the alert level",
    "the batch window",
    "the sampling share",
    "the parcel weight",
    "the backup pause",
)
TIMES = [
    ("at 3 pm", "at 15:00", "at 5 pm"),
    ("on 2024-03-05", "on 5 March 2024", "on 2024-03-06"),
    ("at noon", "at 12:00", "at 13:00"),
    ("on Monday", "on Mondays", "on Tuesday"),
    ("in the morning", "before noon", "in the evening"),
    ("in 2021", "during 2021", "in 2022"),
]
JOBS = (
    "run the nightly backup",
    "send the newsletter",
    "restart the worker",
    "open the booking desk",
    "print the invoices",
    "close the ticket queue",
    "start the import",
    "call the customer",
)
# Each language: ways to ask, actions with their other names, objects, what they are called, order.
LANGUAGES = {
    "de": (
        (
            "wie kann ich {x}",
            "ich möchte {x}, wie geht das",
            "bitte erklären Sie, wie man {x} kann",
            "gibt es einen Weg, {x} zu können",
            "Hilfe beim Vorhaben: {x}",
        ),
        (
            "löschen|entfernen",
            "anlegen|erstellen",
            "umbenennen|anders benennen",
            "teilen|freigeben",
            "sperren|blockieren",
            "exportieren|herunterladen",
        ),
        (
            "den {n} Bericht",
            "das {n} Konto",
            "die {n} Rechnung",
            "den {n} Kalender",
            "die {n} Tabelle",
            "das {n} Passwort",
        ),
        (
            "monatlichen",
            "alten",
            "privaten",
            "gemeinsamen",
            "neuen",
            "ersten",
            "geheimen",
            "leeren",
        ),
        "{o} {v}",
    ),
    "es": (
        (
            "cómo puedo {x}",
            "quiero {x}, cómo se hace",
            "por favor explique cómo {x}",
            "hay alguna manera de {x}",
            "ayuda para {x}",
        ),
        (
            "borrar|eliminar",
            "crear|hacer",
            "renombrar|cambiar el nombre de",
            "compartir|dar acceso a",
            "bloquear|cerrar",
            "exportar|descargar",
        ),
        (
            "el informe {n}",
            "la cuenta {n}",
            "la tabla {n}",
            "el calendario {n}",
            "la carpeta {n}",
            "el archivo {n}",
        ),
        ("mensual", "anterior", "personal", "común", "actual", "cliente", "final", "inicial"),
        "{v} {o}",
    ),
    "fr": (
        (
            "comment puis-je {x}",
            "je voudrais {x}, comment faire",
            "pouvez-vous m'expliquer comment {x}",
            "y a-t-il un moyen de {x}",
            "aidez-moi à {x}",
        ),
        (
            "supprimer|effacer",
            "créer|établir",
            "renommer|changer le nom de",
            "partager|donner accès à",
            "bloquer|verrouiller",
            "exporter|télécharger",
        ),
        (
            "le rapport {n}",
            "le compte {n}",
            "le tableau {n}",
            "le calendrier {n}",
            "le dossier {n}",
            "le fichier {n}",
        ),
        ("mensuel", "ancien", "privé", "commun", "nouveau", "client", "secret", "vide"),
        "{v} {o}",
    ),
    "it": (
        (
            "come posso {x}",
            "vorrei {x}, come si fa",
            "mi può spiegare come {x}",
            "c'è un modo per {x}",
            "ho bisogno di {x}",
        ),
        (
            "cancellare|eliminare",
            "creare|fare",
            "rinominare|cambiare il nome a",
            "condividere|dare accesso a",
            "bloccare|chiudere",
            "esportare|scaricare",
        ),
        (
            "il rapporto {n}",
            "il conto {n}",
            "la tabella {n}",
            "il calendario {n}",
            "la cartella {n}",
            "il documento {n}",
        ),
        (
            "mensile",
            "precedente",
            "personale",
            "comune",
            "attuale",
            "cliente",
            "finale",
            "iniziale",
        ),
        "{v} {o}",
    ),
    "nl": (
        (
            "hoe kan ik {x}",
            "ik wil graag {x}, hoe doe ik dat",
            "kunt u uitleggen hoe ik kan {x}",
            "is er een manier om te {x}",
            "hulp nodig bij: {x}",
        ),
        (
            "verwijderen|wissen",
            "aanmaken|maken",
            "hernoemen|anders noemen",
            "delen|vrijgeven",
            "blokkeren|vergrendelen",
            "exporteren|downloaden",
        ),
        (
            "het {n} rapport",
            "het {n} account",
            "de {n} tabel",
            "de {n} agenda",
            "de {n} map",
            "het {n} bestand",
        ),
        (
            "maandelijkse",
            "oude",
            "persoonlijke",
            "gezamenlijke",
            "nieuwe",
            "eerste",
            "geheime",
            "lege",
        ),
        "{o} {v}",
    ),
    "pt": (
        (
            "como posso {x}",
            "quero {x}, como se faz",
            "por favor explique como {x}",
            "há alguma maneira de {x}",
            "preciso de {x}",
        ),
        (
            "apagar|eliminar",
            "criar|fazer",
            "renomear|mudar o nome de",
            "partilhar|dar acesso a",
            "bloquear|fechar",
            "exportar|baixar",
        ),
        (
            "o relatório {n}",
            "a conta {n}",
            "a tabela {n}",
            "o calendário {n}",
            "a pasta {n}",
            "o arquivo {n}",
        ),
        ("mensal", "anterior", "pessoal", "comum", "atual", "cliente", "final", "inicial"),
        "{v} {o}",
    ),
}
# Each topic in three wordings, with slots.
TOPICS = [
    (
        "{p} does not start on {o}",
        "{p} fails to launch on my {o} machine",
        "cannot open {p} under {o}",
    ),
    ("update {p} to version {v}", "install {p} {v}", "upgrade {p} to {v}"),
    ("where are the logs of {p}", "log file location of {p}", "find what {p} writes to its log"),
    (
        "reset the licence of {p} for {t}",
        "{t} needs a fresh {p} licence",
        "renew {p} licence belonging to {t}",
    ),
    (
        "{p} is slow since yesterday in {c}",
        "since yesterday {p} takes ages in {c}",
        "poor speed of {p} in {c} since yesterday",
    ),
    (
        "add {n} seats of {p} for {t}",
        "order {n} more {p} seats for {t}",
        "{t} wants {n} additional {p} seats",
    ),
    ("give {t} access to {p}", "{t} requires permission for {p}", "let {t} use {p}"),
    ("take {p} away from {t}", "revoke access of {t} to {p}", "{t} should no longer have {p}"),
    (
        "printer in {c} jams when {p} prints",
        "paper jam in {c} caused by {p} jobs",
        "printing from {p} jams the {c} printer",
    ),
    (
        "invite {t} to the {p} training in {c}",
        "book the {c} {p} course for {t}",
        "sign {t} up for {p} lessons held in {c}",
    ),
    (
        "back up {p} data before {d}",
        "secure the data of {p} until {d}",
        "make a copy of {p} data no later than {d}",
    ),
    (
        "why did {p} send {n} mails to {t}",
        "{t} got {n} mails from {p}, what happened",
        "{n} messages of {p} reached {t}, reason?",
    ),
]
SLOTS = {
    "c": ("Bremen", "Porto", "Lyon", "Graz", "Turin", "Leeds"),
    "d": ("Friday", "Monday", "1 June", "15 June", "the weekend"),
    "n": ("2", "3", "5", "8", "12"),
    "o": ("Linux", "Windows", "Android", "macOS"),
    "p": (
        "Mailer",
        "Ledger",
        "Timesheet",
        "Atlas",
        "Canvas",
        "Router",
        "Vault",
        "Planner",
        "Scanner",
        "Bridge",
    ),
    "t": (
        "the finance team",
        "marketing",
        "human resources",
        "the warehouse",
        "legal",
        "the night shift",
        "sales",
    ),
    "v": ("4.1", "4.2", "5.0", "5.10", "6.3"),
}
GREETINGS = (
    "{x}",
    "hi, {x}",
    "{x} please",
    "urgent: {x}",
    "question: {x}",
    "{x}, thanks a lot",
    "hello team, {x}",
    "ticket: {x}",
)


def headings(
    rng: random.Random, data: Path, corpora: tuple[str, ...], count: int
) -> list[Labelled]:
    """Headings of documentation asked for in two ways, beside headings that share most words."""
    found: dict[str, int] = {}
    for corpus in corpora:
        path = data / f"docs_corpora/{corpus}_chunks.jsonl.gz"
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                heading = json.loads(line)["heading"]
                heading = re.sub(r"^[\dA-Z]{1,3}(\.\d+)*\.? ", "", heading).strip(" .`:")
                heading = re.sub(r"\s+", " ", re.sub(r":\w+:|[`|*]", "", heading))
                if 2 <= len(heading.split()) <= 8 and len(heading) < 70:
                    found[heading] = 1
    chosen = list(found)
    rng.shuffle(chosen)
    return asked_for(rng, chosen[:900], count)


def titles(rng: random.Random, data: Path, count: int) -> list[Labelled]:
    """Titles of papers (scifact) asked for in two ways, beside titles that share most words."""
    found: dict[str, int] = {}
    with (data / "scifact/corpus.jsonl").open(encoding="utf-8") as file:
        for line in file:
            title = re.sub(r"\s+", " ", json.loads(line)["title"]).strip(" .")
            if 3 <= len(title.split()) <= 14:
                found[title] = 1
    chosen = list(found)
    rng.shuffle(chosen)
    return asked_for(rng, chosen[:900], count)


def asked_for(rng: random.Random, chosen: list[str], count: int) -> list[Labelled]:
    """Ask for things by name in two ways, and for others that share most of the name's words."""
    words = {heading: set(heading.lower().split()) for heading in chosen}

    def shared(one: str, other: str) -> float:
        return len(words[one] & words[other]) / len(words[one] | words[other])

    near = {
        one: sorted((o for o in chosen if o != one), key=lambda o: -shared(one, o))[:4]
        for one in chosen
    }
    pairs: list[Labelled] = []
    while len(pairs) < count:
        one = rng.choice(chosen)
        draw = rng.random()
        other = one if draw < 0.5 else rng.choice(near[one] if draw < 0.85 else chosen)
        form, other_form = rng.sample(HEADING_FORMS, 2)
        said = one if rng.random() < 0.5 else one.lower()
        other_said = other if rng.random() < 0.5 else other.lower()
        a, b = form.format(x=said), other_form.format(x=other_said)
        if a != b:
            pairs.append((a, b, one.lower() == other.lower()))
    return pairs


def amounts(rng: random.Random, asks: tuple[str, ...], count: int) -> list[Labelled]:
    """One amount or time in two spellings, beside another amount, and beside another thing."""
    pairs: list[Labelled] = []
    while len(pairs) < count:
        measured = rng.random() < 0.6
        value = rng.choice(AMOUNTS if measured else TIMES)
        verbs = rng.choice(VERBS).split("|") if measured else []
        thing = rng.choice(SETTINGS if measured else JOBS)

        def said(amount: str, of: str, verbs: Sequence[str] = verbs) -> str:
            return f"{rng.choice(verbs)} {of} to {amount}" if verbs else f"{of} {amount}"

        draw = rng.random()
        if draw < 0.5:
            one = said(value[rng.randrange(2)], thing)
            pair = (one, said(value[rng.randrange(2)], thing), True)
        elif draw < 0.8:
            pair = (said(value[rng.randrange(2)], thing), said(value[2], thing), False)
        else:
            others = [t for t in (SETTINGS if measured else JOBS) if t != thing]
            other = rng.choice(others)
            pair = (said(value[0], thing), said(value[0], other), False)
        ask, other_ask = rng.sample(asks, 2)
        pairs.append((ask.format(x=pair[0]), other_ask.format(x=pair[1]), pair[2]))
    return pairs


def languages(rng: random.Random, codes: tuple[str, ...], count: int) -> list[Labelled]:
    """Requests by template in other languages than English; both of a pair in one language."""
    pairs: list[Labelled] = []
    while len(pairs) < count:
        asks, actions, objects, names, order = LANGUAGES[rng.choice(codes)]
        one = (rng.choice(actions), rng.choice(objects), rng.choice(names))
        draw, other = rng.random(), one
        if draw >= 0.5:
            if draw < 0.65:
                other = (rng.choice(actions), one[1], one[2])
            elif draw < 0.8:
                other = (one[0], rng.choice(objects), one[2])
            else:
                other = (one[0], one[1], rng.choice(names))

        def said(
            wish: tuple[str, str, str], asks: tuple[str, ...] = asks, order: str = order
        ) -> str:
            ask = rng.choice(asks)
            verb = rng.choice(wish[0].split("|"))
            return ask.format(x=order.format(v=verb, o=wish[1].format(n=wish[2])))

        a, b = said(one), said(other)
        if a != b:
            pairs.append((a, b, one == other))
    return pairs


def helpdesk(rng: random.Random, count: int) -> list[Labelled]:
    """Tickets of few topics, some far more often than others; near misses change one slot."""
    wishes = []
    for topic, wordings in enumerate(TOPICS):
        names = sorted(set(re.findall(r"\{(\w)\}", wordings[0])))
        for _ in range(40):
            wishes.append((topic, tuple((name, rng.choice(SLOTS[name])) for name in names)))
    wishes = list(dict.fromkeys(wishes))
    rng.shuffle(wishes)
    weights = [1 / (rank + 3) ** 0.7 for rank in range(len(wishes))]
    pairs: list[Labelled] = []
    while len(pairs) < count:
        one = rng.choices(wishes, weights)[0]
        draw, other = rng.random(), one
        if 0.55 <= draw < 0.85:
            slots = dict(one[1])
            name = rng.choice(list(slots))
            slots[name] = rng.choice(SLOTS[name])
            other = (one[0], tuple(sorted(slots.items())))
        elif draw >= 0.85:
            other = rng.choices(wishes, weights)[0]

        def said(wish: tuple[int, tuple[tuple[str, str], ...]]) -> str:
            greeting = rng.choice(GREETINGS)
            return greeting.format(x=rng.choice(TOPICS[wish[0]]).format(**dict(wish[1])))

        a, b = said(one), said(other)
        if a != b:
            pairs.append((a, b, one == other))
    return pairs
