awk '{s[$1] += $2; all += $2} END {for (f in s) print f, s[f] | "sort"; close("sort"); print "all", all}' sales.txt > report.txt
echo 'report.txt is written.'
