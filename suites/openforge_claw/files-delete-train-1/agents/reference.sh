rm yarrow.md
echo done
