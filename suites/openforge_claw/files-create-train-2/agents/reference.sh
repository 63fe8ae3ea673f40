echo 'bamboo yarrow' > raven.txt
echo done
