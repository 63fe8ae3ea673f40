wc -l < brook.log > answer.txt
echo done
