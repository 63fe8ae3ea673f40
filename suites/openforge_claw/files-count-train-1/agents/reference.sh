wc -l < mango.txt > answer.txt
echo done
