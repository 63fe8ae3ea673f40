grep -l garnet *.* > answer.txt
echo done
