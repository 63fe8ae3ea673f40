wc -l < lotus.md > answer.txt
echo done
