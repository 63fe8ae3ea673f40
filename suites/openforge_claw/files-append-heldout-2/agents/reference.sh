echo 'indigo gorge' >> delta.txt
echo done
