sed -i 's/dune/zephyr/g' walnut.log
echo done
