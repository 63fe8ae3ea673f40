rm dahlia.txt
echo done
