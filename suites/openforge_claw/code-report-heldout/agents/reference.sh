python3 - <<'END'
code = open("report.py").read()
start = code.index("import sys")
open("report.py", "w").write(code[:start] + '''import sys
from decimal import Decimal


def main():
    sums = {}
    for line in sys.stdin:
        line = line.strip()
        if line and not line.startswith("#"):
            shop, amount = line.split(",")
            sums[shop] = sums.get(shop, Decimal(0)) + Decimal(amount)
    for shop in sorted(sums, key=lambda s: (-sums[s], s)):
        print(shop, f"{sums[shop]:.2f}")
    print("TOTAL", f"{sum(sums.values(), Decimal(0)):.2f}")


if __name__ == "__main__":
    main()
''')
END
python3 test_report.py && echo 'Repaired report.py; the tests pass.'
