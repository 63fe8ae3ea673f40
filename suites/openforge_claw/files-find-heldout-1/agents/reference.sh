grep -l indigo *.* > answer.txt
echo done
