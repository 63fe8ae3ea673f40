echo 'ember harbor' > amber.md
echo done
