echo 'zinc willow' > lotus.md
echo done
