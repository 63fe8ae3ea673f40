rm lagoon.log
echo done
