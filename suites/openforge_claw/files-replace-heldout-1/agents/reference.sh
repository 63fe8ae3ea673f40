sed -i 's/maize/drift/g' cobalt.log
echo done
