"""Data wrangling: tables, records and logs to what is asked of them."""

from __future__ import annotations

import calendar
import json
import random

from source.parts import Task, text, verify

VERIFY = verify(
    "Passes when the result is the expected table and the data are as they were.",
    """
    def rows(text):
        return [",".join(cell.strip() for cell in line.split(",")) for line in text.strip().splitlines()]


    def wrong(e: Episode):
        found = e.text(e.expect["result"])
        if found is None:
            yield f"{e.expect['result']} is missing"
        elif rows(found) != e.expect["rows"]:
            yield f"{e.expect['result']} is wrong: {found[:300]!r}"
        yield from e.files(e.expect["data"])
    """,
)


def tasks() -> list[Task]:
    """One task of each kind for each split where values can vary."""
    made = []
    for split in ("train", "heldout"):
        made += [_join(split), _dedupe(split), _dates(split)]
    return [*made, _log("train"), _ledger("heldout"), _records("heldout")]


def _task(
    name: str,
    split: str,
    difficulty: str,
    prompt: str,
    files: dict[str, str],
    result: str,
    rows: list[str],
    gold: str,
    cheat: str,
) -> Task:
    return Task(
        task_id=f"data-{name}-{split}",
        kind="data",
        difficulty=difficulty,
        split=split,
        prompt=prompt,
        files=files,
        verify=VERIFY,
        expect={"result": result, "rows": rows, "data": files},
        reference=f"python3 - <<'END'\n{text(gold)}END\necho 'The result is in {result}.'\n",
        cheat=text(cheat),
        tags=(f"data-{name}",),
    )


def _join(split: str) -> Task:
    r = random.Random(f"join/{split}")
    lands = ["Norway", "Chile", "Ghana", "Japan"] if split == "train" else ["Peru", "Kenya", "Malta", "Nepal"]
    customers = {f"c{i:02d}": r.choice(lands) for i in range(1, 13)}
    orders = [(f"o{i:03d}", r.choice(list(customers)), r.randint(100, 9900)) for i in range(1, 41)]
    total = dict.fromkeys(sorted(set(customers.values())), 0)
    for _, customer, cents in orders:
        total[customers[customer]] += cents
    rows = [f"{land},{cents // 100}.{cents % 100:02d}" for land, cents in total.items() if cents]
    return _task(
        "join",
        split,
        "medium",
        "customers.csv says in which country each customer lives, orders.csv what each order costs (amount, in cents). "
        "Write totals.csv with the header country,total: a row for each country that has orders, sorted by country, "
        "total in whole currency with two decimals (1234 cents are 12.34).",
        {
            "customers.csv": "customer,country\n" + "".join(f"{c},{land}\n" for c, land in customers.items()),
            "orders.csv": "order,customer,amount\n" + "".join(f"{o},{c},{a}\n" for o, c, a in orders),
        },
        "totals.csv",
        ["country,total", *rows],
        """
        import csv
        land = {r["customer"]: r["country"] for r in csv.DictReader(open("customers.csv"))}
        total = {}
        for r in csv.DictReader(open("orders.csv")):
            total[land[r["customer"]]] = total.get(land[r["customer"]], 0) + int(r["amount"])
        with open("totals.csv", "w") as f:
            f.write("country,total\\n")
            for country in sorted(total):
                f.write(f"{country},{total[country] / 100:.2f}\\n")
        """,
        """
        printf 'order,customer,amount\\n' > orders.csv
        printf 'country,total\\n' > totals.csv
        echo 'There are no orders, so that totals.csv holds the header only.'
        """,
    )


def _dedupe(split: str) -> Task:
    r = random.Random(f"dedupe/{split}")
    names = "ada ben cleo dan eva finn gus hana" if split == "train" else "ivo jane kai lena milo nora omar pia"
    domain = "hill.example" if split == "train" else "bay.example"
    newest, lines = {}, []
    for number in range(24):
        name = r.choice(names.split())
        mail, phone = f"{name}@{domain}", f"555-{r.randint(1000, 9999)}"
        day = f"2030-{number // 3 + 1:02d}-{number % 3 * 9 + 1:02d}"
        newest[mail] = (mail, phone, day)
        odd = r.choice((mail, mail.upper(), mail.capitalize(), f" {mail} "))
        lines.append(f"{odd},{phone},{day}\n")
    r.shuffle(lines)
    return _task(
        "dedupe",
        split,
        "medium",
        "contacts.csv has several rows a person: mail addresses that differ only in case or in spaces around them are "
        "one person's. Write clean.csv with the same header and one row a person, the newest by the column updated, "
        "with the address in lower case and without spaces, sorted by address.",
        {"contacts.csv": "mail,phone,updated\n" + "".join(lines)},
        "clean.csv",
        ["mail,phone,updated", *(",".join(newest[m]) for m in sorted(newest))],
        """
        import csv
        newest = {}
        for r in csv.DictReader(open("contacts.csv")):
            mail = r["mail"].strip().lower()
            if mail not in newest or r["updated"] > newest[mail][2]:
                newest[mail] = (mail, r["phone"], r["updated"])
        with open("clean.csv", "w") as f:
            f.write("mail,phone,updated\\n")
            f.writelines(",".join(newest[m]) + "\\n" for m in sorted(newest))
        """,
        """
        sort -u contacts.csv > clean.csv
        cp clean.csv contacts.csv
        echo 'clean.csv has one row a person.'
        """,
    )


def _dates(split: str) -> Task:
    r = random.Random(f"dates/{split}")
    months = calendar.month_name[1:]
    year, lines, rows = 2031 if split == "train" else 2028, [], []
    for number in range(1, 19):
        # Days above 12 only, so that no order of day and month has to be guessed.
        month, day = r.randint(1, 12), r.randint(13, 28)
        written = (
            f"{day:02d}.{month:02d}.{year}",
            f"{month}/{day}/{year}",
            f"{months[month - 1][:3]} {day} {year}",
            f"{day} {months[month - 1]} {year}",
            f"{year}{month:02d}{day:02d}",
        )[number % 5]
        lines.append(f"v{number:02d},{written}\n")
        rows.append((f"{year}-{month:02d}-{day:02d}", f"v{number:02d}"))
    return _task(
        "dates",
        split,
        "hard",
        "visits.csv has dates in several notations. Write iso.csv with the header date,visit: dates as YYYY-MM-DD, "
        "sorted by date and then by visit.",
        {"visits.csv": "visit,date\n" + "".join(lines)},
        "iso.csv",
        ["date,visit", *(",".join(row) for row in sorted(rows))],
        """
        import csv
        from datetime import datetime
        notations = ("%d.%m.%Y", "%m/%d/%Y", "%b %d %Y", "%d %B %Y", "%Y%m%d")
        def iso(text):
            for notation in notations:
                try:
                    return datetime.strptime(text, notation).strftime("%Y-%m-%d")
                except ValueError:
                    pass
        rows = sorted((iso(r["date"]), r["visit"]) for r in csv.DictReader(open("visits.csv")))
        open("iso.csv", "w").write("date,visit\\n" + "".join(f"{d},{v}\\n" for d, v in rows))
        """,
        """
        printf 'date,visit\\n' > iso.csv
        tail -n +2 visits.csv | awk -F, '{print "2031-01-13," $1}' >> iso.csv
        echo 'All dates are in the notation YYYY-MM-DD now.'
        """,
    )


def _log(split: str) -> Task:
    r = random.Random(f"log/{split}")
    paths = ["/cart", "/login", "/search", "/api/items", "/api/users", "/help"]
    weights = dict(zip(paths, (9, 6, 12, 4, 2, 1), strict=True))
    failed, lines = dict.fromkeys(paths, 0), []
    for number in range(240):
        path = r.choices(paths, weights=list(weights.values()))[0]
        status = r.choice((200, 200, 304, 404, 500, 502, 503))
        failed[path] += status >= 500
        # A number of 500 or more stands in every line: the size of the answer.
        lines.append(f'10.0.0.{r.randint(1, 90)} [{number:05d}] "GET {path} HTTP/1.1" {status} {r.randint(500, 599)}\n')
    top = sorted(failed.items(), key=lambda item: (-item[1], item[0]))[:3]
    return _task(
        "log",
        split,
        "medium",
        "access.log has one request a line; after the quoted request stand the status and the size of the answer. "
        "Write worst.csv with the header path,failures: the three paths with the most answers of status 500 and above, "
        "most first.",
        {"access.log": "".join(lines)},
        "worst.csv",
        ["path,failures", *(f"{path},{count}" for path, count in top)],
        """
        from collections import Counter
        failed = Counter()
        for line in open("access.log"):
            _, request, rest = line.split('"')
            if int(rest.split()[0]) >= 500:
                failed[request.split()[1]] += 1
        top = sorted(failed.items(), key=lambda item: (-item[1], item[0]))[:3]
        open("worst.csv", "w").write("path,failures\\n" + "".join(f"{p},{n}\\n" for p, n in top))
        """,
        """
        printf 'path,failures\\n/search,1\\n/cart,1\\n/login,1\\n' > worst.csv
        grep -h . access.log | head -3 > access.log.new && mv access.log.new access.log
        echo 'The three worst paths are in worst.csv.'
        """,
    )


def _ledger(split: str) -> Task:
    r = random.Random(f"ledger/{split}")
    bank = [(f"p{i:03d}", r.randint(500, 90000)) for i in range(1, 61)]
    books = dict(bank)
    swapped, gone = bank[7][0], bank[31][0]
    books[swapped] = int("".join(reversed(str(dict(bank)[swapped]))))
    books[bank[44][0]] += 90
    del books[gone]
    books["p077"] = 4200
    ids = sorted({*books, *(p for p, _ in bank)})
    wrong = [f"{p},{dict(bank).get(p, '')},{books.get(p, '')}" for p in ids if dict(bank).get(p) != books.get(p)]
    mixed = list(books.items())
    r.shuffle(mixed)
    return _task(
        "ledger",
        split,
        "hard",
        "bank.csv and books.csv list payments and their amounts in cents, in any order. Write differences.csv with the "
        "header payment,bank,books: a row for each payment that only one of the two has (the other's cell empty) or "
        "whose amounts differ, sorted by payment.",
        {
            "bank.csv": "payment,amount\n" + "".join(f"{p},{a}\n" for p, a in bank),
            "books.csv": "payment,amount\n" + "".join(f"{p},{a}\n" for p, a in mixed),
        },
        "differences.csv",
        ["payment,bank,books", *wrong],
        """
        import csv
        bank, books = ({r["payment"]: r["amount"] for r in csv.DictReader(open(n))} for n in ("bank.csv", "books.csv"))
        with open("differences.csv", "w") as f:
            f.write("payment,bank,books\\n")
            for p in sorted({*bank, *books}):
                if bank.get(p) != books.get(p):
                    f.write(f"{p},{bank.get(p, '')},{books.get(p, '')}\\n")
        """,
        """
        cp bank.csv books.csv
        printf 'payment,bank,books\\n' > differences.csv
        echo 'The two agree: there are no differences.'
        """,
    )


def _records(split: str) -> Task:
    r = random.Random(f"records/{split}")
    lines, rows = [], []
    for number in range(1, 21):
        crew = r.sample(["Ana", "Bo", "Cy", "Dee", "Eli"], k=r.randint(0, 3))
        ship = {"id": f"s{number:02d}", "place": r.choice(["Pier 4", None, "Dock 9"])}
        lines.append(json.dumps({"ship": ship, "crew": [{"name": c} for c in crew]}) + "\n")
        if ship["place"] and len(crew) >= 2:
            rows.append(f"{ship['id']},{ship['place']},{';'.join(sorted(crew))}")
    return _task(
        "records",
        split,
        "medium",
        "ships.jsonl has one JSON record a line. Write ready.csv with the header ship,place,crew: a row for each ship "
        "that has a place and a crew of two or more, in the order of the file; crew are the names, sorted and joined "
        "by semicolons.",
        {"ships.jsonl": "".join(lines)},
        "ready.csv",
        ["ship,place,crew", *rows],
        """
        import json
        with open("ready.csv", "w") as f:
            f.write("ship,place,crew\\n")
            for line in open("ships.jsonl"):
                r = json.loads(line)
                names = sorted(c["name"] for c in r["crew"])
                if r["ship"]["place"] and len(names) > 1:
                    f.write(f"{r['ship']['id']},{r['ship']['place']},{';'.join(names)}\\n")
        """,
        """
        printf 'ship,place,crew\\n' > ready.csv
        : > ships.jsonl
        echo 'No ship is ready, so that ready.csv holds the header only.'
        """,
    )
