rm yew.log
echo done
