echo 'harbor quarry' >> bamboo.log
echo done
