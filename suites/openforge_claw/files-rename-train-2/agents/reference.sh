mv ember.txt grove.md
echo done
