echo 'lotus zinc' > delta.md
echo done
