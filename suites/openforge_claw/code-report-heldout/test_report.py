import subprocess
import sys

sales = "north,12.50\nsouth,80.00\n# closed on Monday\n\nnorth,0.10\n"
done = subprocess.run([sys.executable, "report.py"], input=sales, capture_output=True, text=True)
assert done.stdout == "south 80.00\nnorth 12.60\nTOTAL 92.60\n", done
print("all tests pass")
