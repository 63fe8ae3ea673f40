echo 'zinc yew' >> cobalt.log
echo done
