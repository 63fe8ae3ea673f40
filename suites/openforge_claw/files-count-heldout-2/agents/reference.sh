wc -l < acorn.txt > answer.txt
echo done
