sed -i 's/velvet/yarrow/g' sorrel.txt
echo done
