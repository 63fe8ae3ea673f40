mv aspen.txt kelp.md
echo done
