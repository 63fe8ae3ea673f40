cp glade.log indigo/
echo done
