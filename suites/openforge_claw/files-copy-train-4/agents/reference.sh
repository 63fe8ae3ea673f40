cp harbor.md umbra/
echo done
