mv brook.txt velvet.log
echo done
