wc -l < zephyr.md > answer.txt
echo done
