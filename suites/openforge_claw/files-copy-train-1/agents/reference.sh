cp zephyr.log cedar/
echo done
