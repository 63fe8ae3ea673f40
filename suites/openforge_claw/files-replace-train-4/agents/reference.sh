sed -i 's/harbor/brook/g' canoe.md
echo done
