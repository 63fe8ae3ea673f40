python3 - <<'END'
code = open("intervals.py").read()
code = code.replace(
    "in intervals:\n",
    "in sorted(intervals):\n        if end < start:\n            raise ValueError('end before start')\n",
)
code = code.replace("start < merged", "start <= merged").replace("= end\n", "= max(end, merged[-1][1])\n")
open("intervals.py", "w").write(code)
END
python3 test_intervals.py && echo 'Repaired intervals.py; the tests pass.'
