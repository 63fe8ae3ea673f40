echo 'yarrow poplar' >> fjord.log
echo done
