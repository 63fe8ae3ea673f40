python3 -c 'print(*[n for n in range(2, 200) if all(n % d for d in range(2, n))], sep="\n")' > primes.txt
python3 verify.py
