cp dahlia.log otter/
echo done
