echo 'yarrow ember' >> canoe.txt
echo done
