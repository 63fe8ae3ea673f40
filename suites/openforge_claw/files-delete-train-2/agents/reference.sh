rm mango.md
echo done
