grep -l grove *.* > answer.txt
echo done
