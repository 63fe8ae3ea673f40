wc -l < walnut.log > answer.txt
echo done
