cp mango.txt brook/
echo done
