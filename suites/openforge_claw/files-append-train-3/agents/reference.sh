echo 'fennel thistle' >> zephyr.log
echo done
