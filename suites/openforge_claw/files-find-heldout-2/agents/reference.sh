grep -l opal *.* > answer.txt
echo done
