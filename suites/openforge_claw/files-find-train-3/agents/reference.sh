grep -l cedar *.* > answer.txt
echo done
