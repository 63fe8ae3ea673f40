sed -i 's/lagoon/canoe/g' juniper.txt
echo done
