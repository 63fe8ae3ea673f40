echo 'canoe thistle' > raven.txt
echo done
