sed -i 's/sable/opal/g' heron.log
echo done
