rm delta.md
echo done
