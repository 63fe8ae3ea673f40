"""Sums of a sales file:  python3 report.py < sales.csv

Each line is SHOP,AMOUNT with an amount such as 12.50, negative for goods that came back. Prints SHOP AMOUNT
for each shop, the largest amount first and shops of one amount by name, with two decimals; then TOTAL AMOUNT.
Empty lines and lines that begin with # are left out. Sums are exact to the cent.
"""

import sys


def main():
    sums = {}
    for line in sys.stdin:
        shop, amount = line.strip().split(",")
        sums[shop] = sums.get(shop, 0) + float(amount)
    for shop in sorted(sums, key=sums.get):
        print(shop, round(sums[shop], 2))
    print("TOTAL", sum(sums.values()))


if __name__ == "__main__":
    main()
