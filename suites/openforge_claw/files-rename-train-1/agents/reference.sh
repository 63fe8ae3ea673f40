mv juniper.md velvet.txt
echo done
