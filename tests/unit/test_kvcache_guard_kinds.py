"""What tells two questions apart, by the guard that must speak, and what tells nothing apart.

Each line is a pair of questions in which one thing changes: a kind of opposite, of number, of date,
of sign, of order. The second table holds one thing in two spellings.
"""

from __future__ import annotations

import pytest

from stoker.kvcache.amounts import spelled_plainly
from stoker.kvcache.guards import Guard, first_conflict
from stoker.kvcache.question import read_question

DIFFERENT = {
    Guard.NEGATION: """
open an account with fees|open an account without fees
only admins can log in|admins can log in
list all users except admins|list all users
can i pay by card|can't i pay by card
can I pay by card|can I no longer pay by card
can it be done|can it not be done
i have an account|i have no account
nobody came|everybody came
all users|no users
none of the users|all of the users
always restart|never restart
rarely fails|often fails
hardly any errors|many errors
either a or b|neither a nor b
我要开户|我不要开户
我可以取消订单吗|我不可以取消订单吗
هل يمكنني الدفع|لا يمكنني الدفع
можно ли отменить заказ|нельзя ли отменить заказ
я могу войти|я не могу войти
kann ich zahlen|kann ich nicht zahlen
puedo pagar|no puedo pagar
je peux payer|je ne peux pas payer
posso pagare|non posso pagare
eu posso pagar|eu não posso pagar
how do i enable 2fa without a phone|how do i enable 2fa with a phone
allowed|not allowed
do I need a visa|do I not need a visa
sugar-free drinks|sugar drinks
non-smoking room|smoking room
no-code tools|code tools
fail to load|load
failed to load|loaded
refuse to pay|pay
lack of sleep|sleep
instead of a card use cash|instead of cash use a card
""",
    Guard.ANTONYM: """
run the job before midnight|run the job after midnight
set the min value|set the max value
minimum order size|maximum order size
enable notifications|disable notifications
turn on wifi|turn off wifi
turn notifications on|turn notifications off
increase the limit|decrease the limit
raise the limit|lower the limit
what is the capital of france|what is the capital of spain
price in dollars|price in euros
pay in usd|pay in eur
at least 5 users|at most 5 users
more than 5 users|fewer than 5 users
more than 5 users|less than 5 users
over 18|under 18
list users including admins|list users excluding admins
is he married|is she married
his salary|her salary
did he win|did she win
should i buy|should i sell
is the shop open on sunday|is the shop closed on sunday
the north entrance|the south entrance
east coast|west coast
win the game|lose the game
is it legal to drive drunk|is it illegal to drive drunk
who is the mother of luke|who is the father of luke
who is the son of darth|who is the daughter of darth
who is the king of spain|who is the queen of spain
wife of obama|husband of obama
hire an employee|fire an employee
how to gain weight|how to lose weight
arrivals at heathrow|departures at heathrow
inbound calls|outbound calls
supply of gas|demand of gas
import tax|export tax
upper bound|lower bound
ancestors of a node|descendants of a node
domestic flights|international flights
before tax income|after tax income
past events|future events
next meeting|previous meeting
next week|last week
this week|next week
previous version|next version
symptoms of hypertension|symptoms of hypotension
hyperthyroidism treatment|hypothyroidism treatment
microeconomics|macroeconomics
pre-war economy|post-war economy
prewar economy|postwar economy
overweight cats|underweight cats
it is possible|it is impossible
all users|some users
few errors|many errors
the cheapest flight|the most expensive flight
biggest city|smallest city
the best phone|the worst phone
more efficient|less efficient
most popular|least popular
top 10 songs|bottom 10 songs
stop the server|restart the server
start date|end date
begin of contract|end of contract
sunrise time|sunset time
summer opening hours|winter opening hours
morning shift|evening shift
day shift|night shift
credit card|debit card
sell my house|buy my house
teach french|learn french
employer contribution|employee contribution
lender fees|borrower fees
landlord rights|tenant rights
buyer protection|seller protection
payer|payee
cause of x|effect of x
advantages of x|drawbacks of x
benefits of x|risks of x
strengths of python|weaknesses of python
front door|back door
inside temperature|outside temperature
indoor plants|outdoor plants
wet season|dry season
left hand|right hand
single room|double room
iphone battery|android battery
christmas hours|easter hours
java list|javascript list
git pull|git push
true|false
yes|no
until friday|since friday
within 5 days|after 5 days
allowed|forbidden
allowed|prohibited
is it true that it works|is it false that it works
nonsmoking room|smoking room
unlimited data|limited data
sort by date|sort by name
sort the list by date|sort the list by size
group orders by country|group orders by city
contact you by phone|contact you by email
order by created date|order by name
distance in miles|distance in kilometers
temperature in celsius|temperature in fahrenheit
""",
    Guard.NUMBER: """
show the first page|show the last page
ages 5 to 10|ages 5 to 12
ages 5-10|ages 5-12
orders between 10 and 20|orders between 10 and 30
a 5% fee|a 15% fee
upgrade to version 2|upgrade to version 3
two users|three users
2 users|two hundred users
twenty-five users|twenty-six users
twenty five users|twenty six users
one hundred and five users|one hundred and six users
3 million rows|3 billion rows
5 GB disk|5 GiB disk
-5 degrees|5 degrees
below -5 C|below 5 C
5 C|5 F
1/2 cup|1/3 cup
this year|last year
top 10 songs|top 20 songs
iphone 12 battery|iphone 13 battery
python 2 print|python 3 print
section 4a|section 4b
port 80|port 8080
room 101|room 102
chapter ii|chapter iii
world war i|world war ii
henry viii|henry vii
type 1 diabetes|type 2 diabetes
grade 9|grade 10
9th grade|10th grade
second floor|third floor
21st century|20th century
我要2个苹果|我要3个苹果
""",
    Guard.WORD_ORDER: """
flight from Paris to London|flight from London to Paris
flight from paris to london|flight from london to paris
flight to paris|flight from paris
transfers to savings|transfers from savings
convert usd to eur|convert eur to usd
anna paid bob|bob paid anna
is a smaller than b|is b smaller than a
why is redis faster than postgres|why is postgres faster than redis
who killed lincoln|who was killed by lincoln
does the dog chase the cat|is the dog chased by the cat
猫は犬を追う|犬は猫を追う
من القاهرة الى دبي|من دبي الى القاهرة
up to 5|from 5
use a card rather than cash|use cash rather than a card
prefer tea to coffee|prefer coffee to tea
replace tabs with spaces|replace spaces with tabs
subtract 5 from 3|subtract 3 from 5
divide 6 by 3|divide 3 by 6
replace a with b|replace b with a
replace x with y|replace y with x
swap i for j|swap j for i
a minus b|b minus a
ratio of men to women|ratio of women to men
""",
    Guard.UNIT: """
a 5% fee|a 5 point fee
3M rows|3B rows
3k rows|3m rows
10 Mb speed|10 MB speed
€5 fee|$5 fee
5 dollars fee|5 euros fee
£5 fee|$5 fee
5 yen|5 yuan
5 rupees|5 dollars
""",
    Guard.VERSION: """
python 1.2 features|python 1.20 features
python 3.1 features|python 3.10 features
""",
    Guard.DATE: """
events on 2024-01-02|events on 2024-02-01
events on 01/02/2024|events on 02/01/2024
events on March 5|events on March 6
events on 5 March 2024|events on 5 March 2023
meet at 5 am|meet at 5 pm
meet at 5am|meet at 5pm
meet at 17:00|meet at 18:00
1st of may|2nd of may
in the 1980s|in the 1990s
monday opening|tuesday opening
mon-fri opening|sat-sun opening
jan report|feb report
in may|in june
""",
    Guard.NAME: """
1e5 rows|1e6 rows
model S price|model X price
gpt-4 price|gpt-3 price
vitamin b|vitamin c
vitamin d|vitamin k
vitamin a|vitamin e
vitamin d deficiency|vitamin e deficiency
plan a|plan b
hepatitis a|hepatitis b
class a share|class b share
q1 results|q2 results
fy23 results|fy24 results
🙂 react|🙁 react
c# list|c++ list
c list|c++ list
is 5 > 3|is 5 < 3
x >= 5|x <= 5
x = 5|x != 5
a + b|a - b
a/b|a*b
file.txt|file.csv
/etc/hosts|/etc/passwd
user@a.com|user@b.com
--force|--no-force
-r flag|-R flag
""",
}
ALIKE = """
what colour is the sky|what color is the sky
how do I organise files|how do I organize files
cancelled order|canceled order
what is a topic|what's a topic
what is a topic|whats a topic
I am unable to log in|I cannot log in
I'm locked out|I am locked out
how do I delete topics|how do I delete a topic
how far is 1 km|how far is 1000 m
how long is 90 minutes|how long is 1.5 hours
two users|2 users
twenty-five users|25 users
twenty five users|25 users
three hundred users|300 users
one hundred and five users|105 users
3 million rows|3,000,000 rows
3M rows|3 million rows
10k rows|10000 rows
1st place|first place
2nd floor|second floor
May 5 2024|5 May 2024
March 5th|March 5
5th of March|March 5
2024-03-05|5 March 2024
2024-03-05|March 5, 2024
5 pm|5pm
5 pm|17:00
5:00 pm|5 pm
v1.2.3|1.2.3
version 1.2.3|v1.2.3
python 3.10|Python 3.10
10 percent|10 %
10 per cent|10%
$5|5 USD
5 euros|€5
5 EUR|5 €
£5|5 pounds
please tell me how to reset my password|how to reset my password
Could you please help me reset my password?|reset my password
thank you! how do I log in|how do I log in
how do I log in|how can I log in
e-mail address|email address
log in|login
sign up|signup
wi-fi settings|wifi settings
can't log in|cannot log in
can't log in|can not log in
do not|don't
does not work|doesn't work
I will not pay|I won't pay
isn't it open|is not it open
United States|united states
how do i change my PIN|how do i change my pin
How do I change my pin?|how do I change my PIN
What is Kafka?|what is kafka
naïve bayes|naive bayes
café hours|cafe hours
résumé tips|resume tips
half an hour|30 minutes
a dozen eggs|12 eggs
1/2 cup|0.5 cup
one and a half hours|90 minutes
1,000 users|1000 users
24/7 support|24 / 7 support
covid-19 symptoms|COVID-19 symptoms
U.S. president|US president
Mr. Smith|Mr Smith
I need help with my card|help with my card
which card do I have|what card do I have
how to delete a topic in kafka|in kafka how to delete a topic
how to delete a topic in kafka|kafka how to delete a topic
Is it true that water is wet?|water is wet, right?
when does the bank open|what time does the bank open
tell me about photosynthesis|explain photosynthesis
who wrote hamlet|hamlet was written by whom
HOW DO I LOG IN|how do I log in
How Do I Log In|how do i log in
How To Reset My Password|how to reset my password
best pizza in town?|Best pizza in town
２４時間営業|24時間営業
how   many  days|how many days
is the store open today?|is the store open today
mum's birthday|mom's birthday
I have lost my card|I lost my card
my card was stolen|someone stole my card
5 ft|5 feet
6 kg|6000 g
100 F|100 fahrenheit
1 GB|1000 MB
1 hr|60 min
1 hr|1 hour
2 wks|2 weeks
7 days|1 week
12 months|1 year
what does NLP stand for|what does nlp stand for
the first time|the 1st time
top ten songs|top 10 songs
Monday|mondays
on Monday|on monday
sept 5|september 5
Dec 25th|December 25
twice|two times
why won't my card work|why doesn't my card work
my card is not working|my card isn't working
my card is not working|my card doesn't work
sort by date|sort by the date
sort by creation date|sort by date created
how can i sort my list by date|sort a list by date
pay by card|pay with a card
sent by mistake|sent by accident
is a card in the mail|is the card in the mail
can i with a card|can I with the card
"""


def pairs_of(lines: str) -> list[tuple[str, str]]:
    return [
        (one, other) for one, _, other in (row.partition("|") for row in lines.split("\n")[1:-1])
    ]


@pytest.mark.parametrize(
    ("guard", "one", "other"),
    [(guard, *pair) for guard, lines in DIFFERENT.items() for pair in pairs_of(lines)],
)
def test_what_changes_the_meaning_is_refused(guard: Guard, one: str, other: str) -> None:
    for asked, earlier in ((one, other), (other, one)):
        conflict = first_conflict(read_question(asked), read_question(earlier))
        assert conflict is not None
        assert conflict.guard is guard, conflict


@pytest.mark.parametrize(("one", "other"), pairs_of(ALIKE))
def test_another_spelling_is_not_refused(one: str, other: str) -> None:
    for asked, earlier in ((one, other), (other, one)):
        assert first_conflict(read_question(asked), read_question(earlier)) is None


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("one hundred and five users", "105 users"),
        ("three hundred and twenty one thousand and six", "321006"),
        ("two three", "2 3"),
        ("2 and a half hours", "2.5 hours"),
        ("one and a half hours", "1.5 hours"),
        ("salt and two eggs", "salt and 2 eggs"),
        ("two hundred and a card", "200 and a card"),
        ("I have one card", "I have one card"),
        ("5th of May 2024", "2024-05-05"),
        ("may I", "may I"),
        ("12:30 am", "0:30"),
        ("non-smoking", "not smoking"),
        ("World War II", "World War 2"),
    ],
)
def test_one_thing_has_one_spelling(written: str, plain: str) -> None:
    tokens = written.replace("12:30 am", "12:30_am").split()
    assert " ".join(spelled_plainly([token.replace("_", " ") for token in tokens])) == plain


@pytest.mark.parametrize(
    "number",
    ["9" * 5_000, "9," * 5_000, "0." + "3" * 5_000, "9" * 5_000 + "th", "9" * 5_000 + "M",
     "$" + "9" * 5_000, "9" * 5_000 + " million", "hundred " * 5_000, "million " * 5_000],
)  # fmt: skip
def test_numbers_of_any_length_are_read_and_told_apart(number: str) -> None:
    """Python turns no more than 4,300 digits into a number."""
    asked, earlier = read_question(f"what is {number}"), read_question(f"what is 7 {number}")
    assert asked.normal
    assert first_conflict(asked, earlier) is not None


WEEKS = (
    "the shop opens on {}|monday tuesday wednesday thursday friday saturday sunday",
    "ouvert le {}|lundi mardi mercredi jeudi vendredi samedi dimanche",
    "abierto el {}|lunes martes miércoles jueves viernes sábado domingo",
    "aperto {}|lunedì martedì mercoledì giovedì venerdì sabato domenica",
    "aberto na {}|segunda-feira terça-feira quarta-feira quinta-feira sexta-feira",
    "geöffnet am {}|Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag",
    "open op {}|maandag dinsdag woensdag donderdag vrijdag zaterdag zondag",
    "otwarte: {}|poniedziałek wtorek środa czwartek piątek sobota niedziela",
    "öppet på {}|måndag tisdag onsdag torsdag fredag lördag söndag",
    "открыто: {}|понедельник вторник четверг воскресенье",
    "{}に開く|月曜日 火曜日 水曜日 木曜日 金曜日 土曜日 日曜日",
    "{}开门|星期一 星期二 周三 周四 周五 周六 周日",
    "visites en {}|janvier février mars avril mai juin juillet août septembre décembre",
    "visitas en {}|enero febrero marzo abril mayo junio julio septiembre diciembre",
    "visite in {}|gennaio febbraio marzo aprile maggio giugno luglio settembre dicembre",
    "visitas em {}|janeiro fevereiro março abril maio junho julho setembro dezembro",
    "besuche im {}|januar februar märz mai juni juli oktober dezember",
    "приём в {}|январе феврале марте апреле мае июне июле августе",
    "le {} 2024|5 mars;6 mars;5 mai;5 juin",
    "el {} de 2024|5 de mayo;6 de mayo;5 de abril",
    "am {} 2024|5. März;6. März;5. Mai",
)


@pytest.mark.parametrize("week", WEEKS)
def test_days_and_months_are_told_apart_in_their_own_language(week: str) -> None:
    text, names = week.split("|")
    asked = [text.format(name) for name in names.split(";" if ";" in names else None)]
    for one in asked:
        for other in asked:
            found = first_conflict(read_question(one), read_question(other))
            if one == other:
                assert found is None
            else:
                assert found is not None, (one, other)
                assert found.guard is Guard.DATE, (one, other)


OFTEN = {
    "hour": "hourly|per hour|every hour|each hour|by the hour|once an hour",
    "day": "daily|per day|every day|each day|by the day|once a day",
    "week": "weekly|per week|every week|each week|by the week|once a week",
    "month": "monthly|per month|every month|each month|by the month|once a month",
    "year": "yearly|annually|per year|every year|each year|once a year",
}


def test_how_often_is_one_thing_however_it_is_said() -> None:
    said = [
        (unit, f"is the report sent {words}")
        for unit, texts in OFTEN.items()
        for words in texts.split("|")
    ]
    for unit, one in said:
        for other_unit, other in said:
            # "Once" is a number, with a guard of its own.
            if unit == other_unit and "once" not in one + other:
                assert first_conflict(read_question(one), read_question(other)) is None, (
                    one,
                    other,
                )
            elif unit != other_unit:
                assert first_conflict(read_question(one), read_question(other)), (one, other)


@pytest.mark.parametrize(
    ("text", "dates"),
    [
        ("how hot is the Sun", ()), ("rays of the Sun", ()), ("a trip to Sun Valley", ()),
        ("where Emperor Mon lived", ()), ("open on Sun", ("sunday",)),
        ("from Sat to Sun", ("saturday", "sunday")), ("open Sun 5", ("sunday",)),
        ("every Wed", ("wednesday",)), ("Mars is a planet", ()), ("a Mayo sandwich", ()),
        ("mais oui", ()), ("a day trip", ()), ("have a day off", ()), ("m3 of gas", ()),
    ],
)  # fmt: skip
def test_a_word_is_a_date_by_its_place(text: str, dates: tuple[str, ...]) -> None:
    found = read_question(text).dates
    assert all(date in found for date in dates)
    assert found or not dates
    assert bool(found) == bool(dates)


@pytest.mark.parametrize(
    ("one", "other", "guard"),
    [
        ("yesterday's errors", "today's errors", Guard.DATE),
        ("Monday's menu", "Friday's menu", Guard.DATE),
        ("what is on this evening", "what is on tonight", None),
        ("papers by Alan Turing", "papers about Alan Turing", Guard.WORD_ORDER),
        ("reset my e-mail password", "reset my email password", None),
        ("set up Blue-Tooth here", "set up bluetooth here", None),
        ("the capital of peru", "the capital of bolivia", Guard.ANTONYM),
        ("zambian visa rules", "visa rules of malawi", None),
        ("is the weekly limit raised", "is the limit per week raised", None),
        ("what opens on Sunday in Oslo", "what opens in Oslo on Sunday", None),
        ("who governs us", "who governs US", Guard.NAME),
        ("how safe is it", "how safe is IT", Guard.NAME),
        ("people of the US", "people of the us", None),
        ("PEOPLE OF THE US", "people of the us", None),
        ("the root of 5²", "the root of 52", Guard.NUMBER),
        ("solve x² = 4", "solve x^2 = 4", None),
        ("nobody called", "nothing called", Guard.ANTONYM),
        ("something is missing", "someone is missing", Guard.ANTONYM),
        ("travel without a visa", "travel except a visa", Guard.ANTONYM),
    ],
)
def test_more_kinds_of_one_difference(one: str, other: str, guard: Guard | None) -> None:
    for asked, earlier in ((one, other), (other, one)):
        found = first_conflict(read_question(asked), read_question(earlier))
        assert (found.guard if found else None) is guard, found
